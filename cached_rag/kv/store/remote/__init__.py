"""KV on another machine: the tier below the disk, that several machines share."""
