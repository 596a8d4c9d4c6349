"""Networks that rewards are made of: shared CLIPs, BLIP, heads, and how their weights are read."""
