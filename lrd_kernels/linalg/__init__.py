"""Linear algebra with R x R matrices, and products with a factor, in float64."""
