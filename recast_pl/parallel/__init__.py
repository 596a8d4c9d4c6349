"""Several processes of one run: what they tell each other, and weights that they share out."""
