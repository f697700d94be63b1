"""What the engine decides, one idea a file; `streamrl.systems` puts them into named sets."""
