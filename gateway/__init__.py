"""The HTTP gateway: OpenAI's interface in front of coordinators. Holds no state but its open requests."""
