"""Products: einsum, convolution, pooling, attention, linear algebra, Fourier transforms."""
