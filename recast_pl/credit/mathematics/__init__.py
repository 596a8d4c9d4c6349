"""Credit's mathematics as pure functions: moments, regressions, divergences, transport."""
