"""What the columns of a raw row mean: one small module for each trainer's shape, chosen by `factory`."""
