"""What leaves a client, and how it is bounded."""
