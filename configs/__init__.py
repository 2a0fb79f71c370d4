"""Configs: every key is defined once, in base.py."""
