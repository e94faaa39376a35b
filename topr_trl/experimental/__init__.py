"""What may change without notice, as what it builds on may."""
