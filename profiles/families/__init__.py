"""What each Hugging Face ``model_type`` means: families as tables of facts, and the few builders that read them."""
