#pragma once

constexpr int kMaxSites = 4;
constexpr int kSmallTileRows = 8;
constexpr int kLargeTileRows = 64;
constexpr int kChunkK = 128;
constexpr int kBlockK = 1024;
constexpr int kRankGranule = 16;
constexpr int kRanksABlock = 64;
constexpr unsigned kFlagTilesReady = 1;
