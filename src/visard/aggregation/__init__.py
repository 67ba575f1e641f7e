"""How the replies of many clients become one."""
