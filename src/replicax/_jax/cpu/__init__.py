"""What JAX and XLA need said in their own way on CPUs."""
