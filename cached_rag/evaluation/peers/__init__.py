"""Who answers beside a method, in `cached-rag bench answers`: a file a peer."""
