"""What people run: each script parses, calls and prints; what they share lies beside them."""
