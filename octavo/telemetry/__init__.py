"""What can be observed from outside."""
