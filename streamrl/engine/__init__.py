"""The control engine: messages in and out, the state, the policies that decide, and the world that carries commands out."""
