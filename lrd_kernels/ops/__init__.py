"""The raw ops: schemas, the compiled libraries, the choice of a backend, and views of broadcast batches."""
