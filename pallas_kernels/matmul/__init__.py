"""What gated_mlp and fused_matmul are made of: products with an epilogue and the two products of their gradient."""
