"""How the embedded pipeline and its two CLIPs are trained: scenes → VAE → denoiser; scenes → CLIPs."""
