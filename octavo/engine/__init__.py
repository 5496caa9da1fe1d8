"""What runs next: the step loop, the scheduler, and the rules by which a text ends."""
