"""What numalet thinks: pure functions and values, no I/O."""
