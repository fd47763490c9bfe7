"""Documents in, answers out: loading, splitting, embedding, an index to search, and questions."""
