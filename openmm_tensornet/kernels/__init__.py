"""The package's own operators: what each computes, in plain PyTorch, and its kernels for CPUs and NVIDIA GPUs."""
