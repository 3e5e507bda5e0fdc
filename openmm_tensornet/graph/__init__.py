"""What a program does, operator by operator: recorded to a flat graph, and proved to fit a CUDA graph."""
