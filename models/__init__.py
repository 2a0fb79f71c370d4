"""Model definitions: dense decoders and their Hugging Face files."""
