"""Online reinforcement fine-tuning of diffusion models with many rewards; see README.md."""

__version__ = "0.1.0"
