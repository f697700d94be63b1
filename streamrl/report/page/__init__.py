"""The cost-effectiveness report: one HTML page, or Markdown, from what run, plan and study directories hold."""
