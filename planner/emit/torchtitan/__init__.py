"""TorchTitan: a Python function that returns its Trainer.Config, and the way back."""
