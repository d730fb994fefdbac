"""What the compiler says: a compiled program's text, taken apart."""
