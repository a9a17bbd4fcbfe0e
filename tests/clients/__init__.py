"""Programs of others that speak OpenAI's interface, unmodified, against a running `specdec serve --http-port`."""
