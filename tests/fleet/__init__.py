"""A fleet on discrete events: the product's routing, without processes (`python -m tests.fleet`)."""
