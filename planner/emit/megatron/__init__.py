"""Megatron-LM and Megatron-Bridge: flags of pretrain_gpt.py, overrides of a recipe, and the way back."""
