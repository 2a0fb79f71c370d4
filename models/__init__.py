"""Model definitions: dense decoders and their Hugging Face files."""

from models.hf import load_hf, save_hf

__all__ = ["load_hf", "save_hf"]
