"""What API servers know about BAGEL's requests: fields, flows, HTTP, and messages to and from the stages."""
