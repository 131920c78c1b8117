"""What numalet touches: one file per neighbour; no edge imports another."""
