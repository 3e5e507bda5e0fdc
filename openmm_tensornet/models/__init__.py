"""The networks as they are published, in readable PyTorch, and what reads, names and compares them."""
