"""What executes a program: process groups, kernels, executor, launcher, and the simulator of all ranks."""
