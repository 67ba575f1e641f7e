"""How the replies of many clients are combined."""
