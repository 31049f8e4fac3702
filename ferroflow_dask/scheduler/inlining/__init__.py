"""Inlining: small results travel through the scheduler, together with the tasks that read them."""
