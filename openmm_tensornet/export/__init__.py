"""Programs as data: what a force, its XML and an exported file hold, and TorchScript."""
