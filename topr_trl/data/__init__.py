"""Read, check, tokenize and batch rows."""
