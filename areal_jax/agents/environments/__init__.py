"""Episodes that another framework runs: it is spoken to over its wire, and its programs talk to the gateway."""
