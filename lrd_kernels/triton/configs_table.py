"""(op, architecture, compute type, layout) -> rank -> (BLOCK_S, BLOCK_R, warps, stages, programs, input precision).

A rank stands for all up to it from the one before; larger ranks are done in tiles of the last BLOCK_R. "any" serves
the architectures that have no entry. Chosen by what compiles without spills on all of them, not by timing.
"""

_GRAM32 = {
    16: (128, 16, 4, 2, 1024, "ieee"),
    32: (64, 32, 4, 2, 512, "ieee"),
    64: (32, 64, 8, 2, 256, "ieee"),
    128: (32, 128, 16, 2, 256, "ieee"),
}
_GRAM64 = {
    16: (64, 16, 4, 2, 1024, "ieee"),
    32: (32, 32, 4, 2, 512, "ieee"),
    64: (16, 64, 8, 2, 256, "ieee"),
}
_BACKWARD32 = {
    16: (128, 16, 4, 1, 0, "ieee"),
    32: (64, 32, 4, 1, 0, "ieee"),
    64: (32, 64, 8, 1, 0, "ieee"),
    128: (32, 128, 16, 1, 0, "ieee"),
}
_BACKWARD64 = {
    16: (128, 16, 8, 1, 0, "ieee"),
    32: (64, 32, 8, 1, 0, "ieee"),
    64: (32, 64, 16, 1, 0, "ieee"),
    128: (32, 128, 32, 1, 0, "ieee"),
}
_PROJECT32 = {
    16: (64, 16, 4, 1, 0, "ieee"),
    64: (64, 64, 8, 1, 0, "ieee"),
    128: (32, 128, 8, 1, 0, "ieee"),
}
_PROJECT64 = {
    16: (64, 16, 4, 1, 0, "ieee"),
    64: (32, 64, 8, 1, 0, "ieee"),
}

TABLE = {
    ("gram", "any", "float32", "row"): _GRAM32,
    ("gram", "any", "float32", "rank"): _GRAM32,
    ("gram", "any", "float64", "row"): _GRAM64,
    ("gram", "any", "float64", "rank"): _GRAM64,
    ("log_prob_bwd", "any", "float32", "row"): _BACKWARD32,
    ("log_prob_bwd", "any", "float32", "rank"): _BACKWARD32,
    ("log_prob_bwd", "any", "float64", "row"): _BACKWARD64,
    ("log_prob_bwd", "any", "float64", "rank"): _BACKWARD64,
    ("project_fold", "any", "float32", "row"): _PROJECT32,
    ("project_fold", "any", "float32", "rank"): _PROJECT32,
    ("project_fold", "any", "float64", "row"): _PROJECT64,
    ("project_fold", "any", "float64", "rank"): _PROJECT64,
}
