"""Linear algebra of R x R matrices and of products with a factor, in float64."""
