"""Model definitions: Qwen2.5 and its Hugging Face files."""

from models.hf import load_hf, save_hf

__all__ = ["load_hf", "save_hf"]
