"""Real parties: what they are asked, what they allow, their keys, and the wire between them."""
