"""Speed and memory, always against a peer in the same run."""
