"""PyTorch's other tests of DCP's functions."""
