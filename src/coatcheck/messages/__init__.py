"""What is known about the message formats of providers and hosts."""
