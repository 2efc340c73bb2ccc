"""Messages, handshake and limits. docs/protocol.md is the prose for another implementation."""
