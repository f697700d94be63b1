"""What the engine decides, one idea a file; `streamrl.engine.systems` puts them together."""
