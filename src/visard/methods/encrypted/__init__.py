"""The parties' side of encrypted MMD; the method itself is `methods/encrypted_mmd.py`."""
